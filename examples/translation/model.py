"""The two Transformers of the GPipe paper (arXiv:1811.06965): the translation model T(L, H, A), and Transformer-L.

T(L, H, A) has L encoder and L decoder blocks with feed-forward width H and A attention heads. The width of the model
stays (1,024 in the paper) and so does that of a head, so that attention is A times 64 wide. Transformer-L, the model of
the paper's table of sizes, is a language model: L decoder blocks without an encoder.

Every block is one Keras layer, so that a pipeline can be cut between any two. What a decoder block needs besides its
input, the encoder's states and the mask of the source's padding, are arguments; across a cut they travel with the
micro-batch that they belong to.

Two things keep very deep models stable in the paper: `scale_feed_forward` and `logit_clip`.
"""

import math

import keras
import numpy as np

PAD = 0  # the token that fills up short sentences


@keras.saving.register_keras_serializable("translation")
class Positions(keras.layers.Layer):
    """Adds sinusoidal positions to embedded tokens, which it first multiplies by the root of their width.

    Args:
        dropout: rate of the dropout that follows.
    """

    def __init__(self, dropout: float = 0.0, **kwargs) -> None:
        super().__init__(**kwargs)
        self.rate = dropout
        self.dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, input_shape) -> None:
        """Computes the sinusoids: wavelengths from 2π to 2π·10,000, sines in the first half of the channels."""
        _, length, width = input_shape
        rates = 10_000.0 ** -np.linspace(0, 1, width // 2)
        angles = np.arange(length)[:, None] * rates
        self.sinusoids = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)

    def call(self, inputs, training=None):
        """Returns a tensor of the shape of `inputs`, (rows, tokens, width)."""
        positions = keras.ops.convert_to_tensor(self.sinusoids, dtype=inputs.dtype)
        return self.dropout(inputs * math.sqrt(inputs.shape[-1]) + positions, training=training)

    def compute_output_shape(self, input_shape) -> tuple:
        """Returns the shape of the inputs."""
        return tuple(input_shape)

    def get_config(self) -> dict:
        """Returns the arguments of `__init__`."""
        return {**super().get_config(), "dropout": self.rate}


class Block(keras.layers.Layer):
    """What encoder and decoder blocks share: arguments, residual connections, the feed-forward layers.

    The norm comes before each part ("pre-norm").

    Args:
        num_heads: A, attention heads.
        head_dim: width of each head.
        hidden_dim: H, width of the feed-forward layers.
        use_bias: whether projections and feed-forward layers have biases, and norms a scale and an offset.
        feed_forward_scale: factor of the initial weights of the feed-forward layers, Glorot's otherwise.
        dropout: rate of the dropout at the end of each part.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_dim: int,
        use_bias: bool = False,
        feed_forward_scale: float = 1.0,
        dropout: float = 0.0,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.hidden_dim = hidden_dim
        self.use_bias = use_bias
        self.feed_forward_scale = feed_forward_scale
        self.rate = dropout
        self.dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def _add_attention(self, name: str, query_shape, value_shape) -> tuple[keras.Layer, keras.Layer]:
        """Returns a norm and the attention that follows it, both built."""
        norm = layer_norm(self.use_bias, f"{name}_norm", dtype=self.dtype_policy)
        attention = keras.layers.MultiHeadAttention(
            self.num_heads, self.head_dim, use_bias=self.use_bias, name=name, dtype=self.dtype_policy
        )
        norm.build(query_shape)
        attention.build(query_shape, value_shape)
        return norm, attention

    def _add_feed_forward(self, shape) -> None:
        """Builds a norm and the two feed-forward layers."""
        self.feed_forward_norm = layer_norm(self.use_bias, "feed_forward_norm", dtype=self.dtype_policy)
        self.feed_forward_norm.build(shape)
        self.expand, self.contract = (
            keras.layers.Dense(
                units,
                activation,
                use_bias=self.use_bias,
                # Glorot's initialisation, times the factor.
                kernel_initializer=keras.initializers.VarianceScaling(
                    self.feed_forward_scale**2, mode="fan_avg", distribution="uniform"
                ),
                name=name,
                dtype=self.dtype_policy,
            )
            for units, activation, name in ((self.hidden_dim, "relu", "expand"), (shape[-1], None, "contract"))
        )
        self.expand.build(shape)
        self.contract.build((*shape[:-1], self.hidden_dim))

    def _feed_forward(self, x, training):
        hidden = self.expand(self.feed_forward_norm(x))
        return x + self.dropout(self.contract(hidden), training=training)

    def compute_output_shape(self, x_shape) -> tuple:
        """Returns the shape of the input."""
        return tuple(x_shape)

    def get_config(self) -> dict:
        """Returns the arguments of `__init__`."""
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "hidden_dim": self.hidden_dim,
            "use_bias": self.use_bias,
            "feed_forward_scale": self.feed_forward_scale,
            "dropout": self.rate,
        }


@keras.saving.register_keras_serializable("translation")
class EncoderBlock(Block):
    """Self-attention to all tokens but padding, then the feed-forward layers."""

    def build(self, x_shape) -> None:
        """Builds both parts."""
        self.attention_norm, self.attention = self._add_attention("attention", x_shape, x_shape)
        self._add_feed_forward(x_shape)

    def call(self, x, source_mask, training=None):
        """Returns the states of the next block.

        Args:
            x: states, (rows, source tokens, width).
            source_mask: True where there is a token and False for padding, (rows, source tokens).
            training: whether dropout is on.
        """
        normed = self.attention_norm(x)
        attended = self.attention(normed, normed, attention_mask=source_mask[:, None, :], training=training)
        return self._feed_forward(x + self.dropout(attended, training=training), training)


@keras.saving.register_keras_serializable("translation")
class DecoderBlock(Block):
    """Self-attention to the tokens before, attention to the encoder's states if given, then the feed-forward layers.

    Padding at the end of a target needs no mask: the tokens before it do not attend to it.
    """

    def build(self, x_shape, memory_shape=None, source_mask_shape=None) -> None:
        """Builds two parts, or three with an encoder."""
        self.attention_norm, self.attention = self._add_attention("attention", x_shape, x_shape)
        if memory_shape is not None:
            self.cross_norm, self.cross = self._add_attention("cross", x_shape, memory_shape)
        self._add_feed_forward(x_shape)

    def call(self, x, memory=None, source_mask=None, training=None):
        """Returns the states of the next block.

        Args:
            x: states, (rows, target tokens, width).
            memory: the encoder's states, (rows, source tokens, width); None for a language model.
            source_mask: True where the source has a token, (rows, source tokens).
            training: whether dropout is on.
        """
        normed = self.attention_norm(x)
        attended = self.attention(normed, normed, use_causal_mask=True, training=training)
        x = x + self.dropout(attended, training=training)
        if memory is not None:
            mask = source_mask[:, None, :]
            attended = self.cross(self.cross_norm(x), memory, attention_mask=mask, training=training)
            x = x + self.dropout(attended, training=training)
        return self._feed_forward(x, training)


def layer_norm(affine: bool, name: str, **kwargs) -> keras.Layer:
    """Layer norm, with a scale and an offset or with neither."""
    return keras.layers.LayerNormalization(center=affine, scale=affine, epsilon=1e-6, name=name, **kwargs)


def embedding(vocabulary: int, width: int, name: str, kind: type = keras.layers.Embedding) -> keras.Layer:
    """A table of a vocabulary, small at first, since `Positions` multiplies what is looked up."""
    return kind(vocabulary, width, keras.initializers.RandomNormal(stddev=width**-0.5), name=name)


def translation_transformer(
    layers: int,
    hidden: int,
    heads: int,
    *,
    width: int = 1024,
    head_dim: int = 64,
    vocabulary: int = 64_000,
    tables: int = 3,
    length: int = 128,
    dropout: float = 0.0,
    scale_feed_forward: bool = True,
    logit_clip: float | None = None,
) -> keras.Model:
    """T(L, H, A): takes source and target tokens, both (rows, `length`), and returns the logits of the next token.

    Neither projections nor feed-forward layers have biases, and norms have no scale or offset.

    Args:
        layers: L, blocks in the encoder, and as many in the decoder.
        hidden: H, width of the feed-forward layers.
        heads: A, attention heads.
        width: of the states between blocks.
        head_dim: width of each head.
        vocabulary: number of tokens, padding (0) among them.
        tables: 3 tables of the vocabulary, for source, target and logits; 2, where source and target share theirs; or
            1 for all of them.
        length: number of tokens in a row, padding included.
        dropout: rate after the embedding and after each part of a block.
        scale_feed_forward: whether the initial weights of the feed-forward layers are divided by L.
        logit_clip: threshold beyond which logits are clipped, on both sides; None for none.
    """
    if tables not in (1, 2, 3):
        raise ValueError(f"Expected 1, 2 or 3 tables of the vocabulary. Received: tables={tables}.")
    block = {
        "num_heads": heads,
        "head_dim": head_dim,
        "hidden_dim": hidden,
        "feed_forward_scale": 1 / layers if scale_feed_forward else 1.0,
        "dropout": dropout,
    }
    kind = keras.layers.ReversibleEmbedding if tables == 1 else keras.layers.Embedding
    embed_source = embedding(vocabulary, width, "embed_source" if tables == 3 else "embed", kind)
    embed_target = embedding(vocabulary, width, "embed_target") if tables == 3 else embed_source

    source = keras.Input((length,), dtype="int32", name="source")
    source_mask = keras.ops.not_equal(source, PAD)
    x = Positions(dropout, name="source_positions")(embed_source(source))
    for i in range(layers):
        x = EncoderBlock(**block, name=f"encoder_{i}")(x, source_mask)
    memory = layer_norm(False, "encoder_norm")(x)

    target = keras.Input((length,), dtype="int32", name="target")
    y = Positions(dropout, name="target_positions")(embed_target(target))
    for i in range(layers):
        y = DecoderBlock(**block, name=f"decoder_{i}")(y, memory, source_mask)
    y = layer_norm(False, "decoder_norm")(y)
    if tables == 1:
        logits = embed_source(y, reverse=True)
    else:
        logits = keras.layers.Dense(vocabulary, use_bias=False, name="logits")(y)
    if logit_clip is not None:
        logits = keras.ops.clip(logits, -logit_clip, logit_clip)
    return keras.Model([source, target], logits, name=f"t_{layers}_{hidden}_{heads}")


def language_transformer(
    layers: int,
    *,
    hidden: int = 8192,
    heads: int = 16,
    width: int = 2048,
    vocabulary: int = 32_000,
    length: int = 1024,
    scale_feed_forward: bool = True,
) -> keras.Model:
    """Transformer-L, a language model: takes tokens, (rows, `length`), and returns the logits of the next token.

    Projections and feed-forward layers have biases, norms a scale and an offset, and the logits a table of their own.

    Args:
        layers: L, decoder blocks.
        hidden: width of the feed-forward layers.
        heads: attention heads, together as wide as the states.
        width: of the states between blocks.
        vocabulary: number of tokens.
        length: number of tokens in a row.
        scale_feed_forward: whether the initial weights of the feed-forward layers are divided by L.
    """
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    x = Positions(name="positions")(embedding(vocabulary, width, "embed")(tokens))
    scale = 1 / layers if scale_feed_forward else 1.0
    for i in range(layers):
        name = f"decoder_{i}"
        x = DecoderBlock(heads, width // heads, hidden, use_bias=True, feed_forward_scale=scale, name=name)(x)
    x = layer_norm(True, "decoder_norm")(x)
    logits = keras.layers.Dense(vocabulary, name="logits")(x)
    return keras.Model(tokens, logits, name=f"transformer_{layers}")


def most_stages(layers: int, *, language_model: bool = False) -> int:
    """The number of operations of `translation_transformer`, or of `language_transformer`. Each stage needs one."""
    return layers + 4 if language_model else 2 * layers + 8
