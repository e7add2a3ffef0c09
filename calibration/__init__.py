"""Calibration: stream batches through a teacher, keep sufficient statistics, fit coefficients."""
