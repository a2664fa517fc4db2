"""The one wire from the trainer to the engines. To add a carrier, write both its ends in one file and add it to CARRIERS."""
