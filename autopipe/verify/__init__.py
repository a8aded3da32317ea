"""The equality proof: training in stages against plain training, tensor by tensor."""
