"""Training: optimisers, schedules, the loop and its hooks, and the stages from pre-training to
fine-tuning."""
