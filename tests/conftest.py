"""Eight logical CPU devices for every test; TensorFlow must not start before they are made."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import tf_gpipe

tf_gpipe.set_logical_cpus(8)
tf.config.threading.set_inter_op_parallelism_threads(4)
