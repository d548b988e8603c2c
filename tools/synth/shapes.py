"""Tensors of a FLUX.2 Klein checkpoint, by the names of diffusers and transformers, from its config files.

One function a component: its config.json in, every tensor's shape out, in the order in which the published files have them.
"""

Shapes = dict[str, tuple[int, ...]]


def text_encoder(c: dict) -> Shapes:
    """Qwen3ForCausalLM; the output layer is a tensor of its own unless it is tied to the embedding."""
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shapes = {"model.embed_tokens": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm"] = (hidden,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head"] = (c["vocab_size"], hidden)
    return weights_of(shapes)


def transformer(c: dict) -> Shapes:
    """Flux2Transformer2DModel without guidance embedding. No layer has a bias."""
    head = c["attention_head_dim"]
    width = c["num_attention_heads"] * head
    inner = int(width * c["mlp_ratio"])
    shapes = {
        "time_guidance_embed.timestep_embedder.linear_1": (width, c["timestep_guidance_channels"]),
        "time_guidance_embed.timestep_embedder.linear_2": (width, width),
        "double_stream_modulation_img.linear": (6 * width, width),
        "double_stream_modulation_txt.linear": (6 * width, width),
        "single_stream_modulation.linear": (3 * width, width),
        "x_embedder": (width, c["in_channels"]),
        "context_embedder": (width, c["joint_attention_dim"]),
    }
    for i in range(c["num_layers"]):
        block = f"transformer_blocks.{i}"
        attention = {
            **dict.fromkeys(("to_q", "to_k", "to_v"), (width, width)), "norm_q": (head,), "norm_k": (head,),
            "to_out.0": (width, width), "norm_added_q": (head,), "norm_added_k": (head,),
            **dict.fromkeys(("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"), (width, width)),
        }  # fmt: skip
        shapes |= {f"{block}.attn.{name}": shape for name, shape in attention.items()}
        for name in ("ff", "ff_context"):
            shapes[f"{block}.{name}.linear_in"] = (2 * inner, width)
            shapes[f"{block}.{name}.linear_out"] = (width, inner)
    for i in range(c["num_single_layers"]):
        block = f"single_transformer_blocks.{i}.attn"
        shapes[f"{block}.to_qkv_mlp_proj"] = (3 * width + 2 * inner, width)
        shapes[f"{block}.norm_q"] = shapes[f"{block}.norm_k"] = (head,)
        shapes[f"{block}.to_out"] = (width, width + inner)
    shapes["norm_out.linear"] = (2 * width, width)
    shapes["proj_out"] = (c["in_channels"], width)
    return weights_of(shapes)


def vae(c: dict) -> Shapes:
    """AutoencoderKLFlux2, encoder and decoder; batch norm statistics of the packed latents stand at the end."""
    channels, latent, layers = c["block_out_channels"], c["latent_channels"], c["layers_per_block"]
    first, last = channels[0], channels[-1]
    downs = zip([first, *channels], channels)
    ups = zip([last, *channels[::-1]], channels[::-1])
    packed = latent * c["patch_size"][0] * c["patch_size"][1]
    shapes = {
        **conv("encoder.conv_in", first, c["in_channels"], 3),
        **blocks("encoder.down_blocks", downs, layers, "downsamplers"),
        **middle("encoder.mid_block", last),
        **norm("encoder.conv_norm_out", last),
        **conv("encoder.conv_out", 2 * latent, last, 3),
        **conv("decoder.conv_in", last, latent, 3),
        **blocks("decoder.up_blocks", ups, layers + 1, "upsamplers"),
        **middle("decoder.mid_block", last),
        **norm("decoder.conv_norm_out", first),
        **conv("decoder.conv_out", c["out_channels"], first, 3),
        **conv("quant_conv", 2 * latent, 2 * latent, 1),
        **conv("post_quant_conv", latent, latent, 1),
    }
    return shapes | {"bn.running_mean": (packed,), "bn.running_var": (packed,), "bn.num_batches_tracked": ()}


COMPONENTS = {"text_encoder": text_encoder, "transformer": transformer, "vae": vae}


def weights_of(layers: Shapes) -> Shapes:
    return {f"{name}.weight": shape for name, shape in layers.items()}


def blocks(name: str, widths, layers: int, resampler: str) -> Shapes:
    """Resnets of every block, and the convolution by which all blocks but the last change the resolution."""
    shapes, widths = {}, list(widths)
    for i, (inputs, outputs) in enumerate(widths):
        for layer in range(layers):
            shapes |= resnet(f"{name}.{i}.resnets.{layer}", inputs if layer == 0 else outputs, outputs)
        if i + 1 < len(widths):
            shapes |= conv(f"{name}.{i}.{resampler}.0.conv", outputs, outputs, 3)
    return shapes


def middle(name: str, width: int) -> Shapes:
    attention = f"{name}.attentions.0"
    shapes = norm(f"{attention}.group_norm", width)
    for layer in ("to_q", "to_k", "to_v", "to_out.0"):
        shapes |= {f"{attention}.{layer}.weight": (width, width), f"{attention}.{layer}.bias": (width,)}
    return shapes | resnet(f"{name}.resnets.0", width, width) | resnet(f"{name}.resnets.1", width, width)


def resnet(name: str, inputs: int, outputs: int) -> Shapes:
    shapes = norm(f"{name}.norm1", inputs) | conv(f"{name}.conv1", outputs, inputs, 3)
    shapes |= norm(f"{name}.norm2", outputs) | conv(f"{name}.conv2", outputs, outputs, 3)
    return shapes if inputs == outputs else shapes | conv(f"{name}.conv_shortcut", outputs, inputs, 1)


def conv(name: str, outputs: int, inputs: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, kernel, kernel), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
