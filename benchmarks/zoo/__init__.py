"""The zoo: every kind of model that people have, each from its unmodified source to exact training in three stages."""
