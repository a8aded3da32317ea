"""The zoo: many kinds of models, each taken from its unmodified source to exact training in three stages."""
