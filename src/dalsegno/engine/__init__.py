"""One request end to end: the step loop, and the Python front end around it."""
