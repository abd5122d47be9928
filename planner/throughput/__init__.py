"""The formula rung's speed model: operator counts, a roofline per operator class, calibrated constants apart from facts."""
