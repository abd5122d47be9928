"""From runs on meta tensors to step profiles (`planner.memory.step_profile`)."""
