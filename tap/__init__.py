"""TAP, the Trajectory Autoencoding Planner: data, models, planner, evaluation, tracking and serving of a policy."""
