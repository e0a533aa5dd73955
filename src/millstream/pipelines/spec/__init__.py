"""YAML to a validated spec. Text enters, a ``Pipeline`` leaves, or one error with all that is wrong; no Spark here."""
