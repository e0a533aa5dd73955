"""The end of a delivery: acknowledged, put off, handed back, buried, or answered with outputs."""
