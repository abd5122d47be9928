"""Reports: rows from candidates, then terminal, Markdown and HTML. Accuracy of predictions against measurements."""
