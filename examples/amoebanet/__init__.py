"""AmoebaNet for Keras: the network, its input pipeline and its training recipe."""
