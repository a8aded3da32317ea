"""The call of the model: what decides how it computes, its recording, and what else it would do."""
