"""The stages of the pipeline, a module each: see asapc.pipeline for how they follow each other."""
