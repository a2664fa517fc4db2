"""What a run writes down: metrics, TensorBoard, transcripts, report."""
