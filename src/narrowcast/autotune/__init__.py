"""What is worthwhile on this link: calibration, sampling, cost model, solver, controller."""
