"""The formula level's memory model: one function per term, composed in `model.predict_memory`."""
