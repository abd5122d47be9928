"""From runs on meta tensors to step profiles (`planner.memory.profiles`)."""
