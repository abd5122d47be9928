"""What is measured of the planner itself, and how: nothing here is installed with it."""
