"""The tools that train: their settings (`tools`), their files read (`readers`) and written (`exporters`)."""
