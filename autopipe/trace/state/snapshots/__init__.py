"""The values at every place that state is kept in, compared and restored."""
