"""What a run does: the loop of reinforcement learning, distillation, evaluation."""
