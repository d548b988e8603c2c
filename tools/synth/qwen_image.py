"""Tensors of a Qwen-Image-2.1 checkpoint that text to image reads: without the vision tower, the language model's output layer
and the autoencoder's encoder. Names and shapes as in `shapes`.
"""

from .shapes import Shapes, conv, weights_of

LANGUAGE_MODEL = "model.language_model"


def text_encoder(c: dict) -> Shapes:
    """The text stack of Qwen3VLForConditionalGeneration."""
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    shapes = {f"{LANGUAGE_MODEL}.embed_tokens": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        shapes |= {f"{LANGUAGE_MODEL}.layers.{i}.{name}": shape for name, shape in layer.items()}
    return weights_of(shapes | {f"{LANGUAGE_MODEL}.norm": (hidden,)})


def transformer(c: dict) -> Shapes:
    """QwenImage21Transformer2DModel. No layer has a bias."""
    head, text = c["attention_head_dim"], c["context_in_dim"]
    width = c["num_attention_heads"] * head
    inner = int(width * c["mlp_ratio"])
    block = {
        **dict.fromkeys((f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")), (width, width)),
        "attn.norm_q": (head,), "attn.norm_k": (head,),
        "img_mlp.gate_layer": (inner, width), "img_mlp.proj": (inner, width), "img_mlp.out": (width, inner),
    }  # fmt: skip
    shapes = {
        "img_in": (width, c["in_channels"]),
        "txt_in.text_norm": (text,), "txt_in.in_layer": (width, text), "txt_in.out_layer": (width, width),
        "time_text_embed.timestep_embedder.linear_1": (width, 256),
        "time_text_embed.timestep_embedder.linear_2": (width, width),
        "modulation.1": (4 * width, width),
    }  # fmt: skip
    for i in range(c["num_layers"]):
        shapes |= {f"transformer_blocks.{i}.{name}": shape for name, shape in block.items()}
    return weights_of(shapes | {"norm_out.linear": (width, width), "proj_out": (c["out_channels"], width)})


def vae(c: dict) -> Shapes:
    """The decoder of AutoencoderKLQwenImage21."""
    widths = [c["decoder_base_dim"] * multiple for multiple in [c["dim_mult"][-1], *reversed(c["dim_mult"])]]
    latent, middle, last = c["z_dim"], widths[0], widths[-1]
    attention = "decoder.mid_block.attentions.0"
    shapes = {
        **conv("post_quant_conv", latent, latent, 1),
        **conv("decoder.conv_in", middle, latent, 3),
        **resnet("decoder.mid_block.resnets.0", middle, middle),
        f"{attention}.norm.gamma": (middle, 1, 1),
        **conv(f"{attention}.to_qkv", 3 * middle, middle, 1),
        **conv(f"{attention}.proj", middle, middle, 1),
        **resnet("decoder.mid_block.resnets.1", middle, middle),
    }
    for i, (inputs, outputs) in enumerate(zip(widths, widths[1:])):
        for layer in range(c["num_res_blocks"] + 1):
            shapes |= resnet(f"decoder.up_blocks.{i}.resnets.{layer}", inputs if layer == 0 else outputs, outputs)
        if i + 2 < len(widths):
            shapes |= conv(f"decoder.up_blocks.{i}.upsampler.resample.1", outputs, outputs, 3)
    shapes |= {"decoder.norm_out.gamma": (last, 1, 1, 1)}
    return shapes | conv("decoder.conv_out", c["out_channels"], last, 3)


COMPONENTS = {"text_encoder": text_encoder, "transformer": transformer, "vae": vae}


def resnet(name: str, inputs: int, outputs: int) -> Shapes:
    shapes = {f"{name}.norm1.gamma": (inputs, 1, 1, 1), **conv(f"{name}.conv1", outputs, inputs, 3)}
    shapes |= {f"{name}.norm2.gamma": (outputs, 1, 1, 1), **conv(f"{name}.conv2", outputs, outputs, 3)}
    return shapes if inputs == outputs else shapes | conv(f"{name}.conv_shortcut", outputs, inputs, 1)
