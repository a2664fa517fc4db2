"""Observation of a run: metrics, transcripts, progress, and the report page."""
