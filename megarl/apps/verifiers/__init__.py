"""The verifiers of the house, by whose names a recipe asks for them."""
