"""What a run reports: metrics, transcripts, progress on the terminal, and the report page."""
