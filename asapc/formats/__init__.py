"""Reading and writing: models, data, calibrations and artefacts."""
