//! What graphs that others exported take and give: one contract per part of the model.
//!
//! Exporters name the same tensors differently. [`adapt`] gives a graph the names of this program's own graphs, where
//! they have the same meaning, and one set of names for its open dimensions, so that nothing after it knows who exported
//! the graph. Sources of the names: flux2-vulkan-bridge's bundles, and diffusers' modules as optimum and others export them.

use std::{collections::HashSet, fmt};

use super::sigma::take_in_f32;
use crate::onnx::{DType, Dim, Graph, Model, ValueId, ValueType};

/// A graph's part in drawing a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    TextEncoder,
    Transformer,
    /// The whole image decoder, with the batch norm's statistics and the unpacking of latents inside.
    Decoder,
    /// The decoder up to the queries, keys and values of its middle attention.
    DecoderStart,
    /// That attention, over some rows of the queries.
    Attention,
    /// What follows it: stage `index`, and whether that is the last one.
    DecoderEnd {
        index: usize,
        last: bool,
    },
}

/// What a graph's contract says is broken.
#[derive(Debug, thiserror::Error)]
pub enum ContractError {
    #[error("{role}: no {side} {name}; the graph has {found}")]
    Missing { role: Role, side: &'static str, name: String, found: String },
    #[error("{role}: input '{name}' is not known; expected {expected}")]
    Unexpected { role: Role, name: String, expected: String },
    #[error("{role}: {tensor} is {found}, but {expected} is expected")]
    Mismatch { role: Role, tensor: String, found: String, expected: String },
    #[error("{role}: '{name}' is used inside the body of a node, where it cannot be renamed")]
    Captured { role: Role, name: String },
    #[error("{role}: {problem}")]
    Unclear { role: Role, problem: String },
}

/// Which element types a tensor may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    /// f32 or f16.
    Float,
    /// i64.
    Index,
    /// f32, f16 or i64: positions.
    Number,
}

/// One size of a tensor.
#[derive(Clone, Debug)]
enum Size {
    One,
    Fixed(usize),
    /// Open, under this name.
    Named(String),
    /// What the graph says.
    Own,
}

/// An input or output.
struct Port {
    /// As this program's own graphs name it.
    name: String,
    aliases: &'static [&'static str],
    element: Element,
    /// The last axes; axes before them have size 1.
    sizes: Vec<Size>,
}

struct Contract {
    inputs: Vec<Port>,
    outputs: Vec<Port>,
}

/// The noise level of a step.
const SIGMA: &str = "sigma";
/// The state between the decoder's middle block and the stages after it.
pub const MIDDLE: &str = "vae_mid_res0";
/// The attention's result, as the stage after it takes it.
pub const ATTENDED: &str = "attn";
/// The decoder's picture in -1..1.
pub const PICTURE: &str = "image_raw";

impl Role {
    /// The role's stage in a bundle.
    pub fn stage(self) -> String {
        match self {
            Role::TextEncoder => "text_encoder".to_owned(),
            Role::Transformer => "transformer".to_owned(),
            Role::Decoder => "vae_decoder".to_owned(),
            Role::DecoderStart => "vae_pre".to_owned(),
            Role::Attention => "vae_attention".to_owned(),
            Role::DecoderEnd { index, .. } => format!("vae_post{index}"),
        }
    }

    /// The part of the model that the stage belongs to.
    pub fn component(self) -> &'static str {
        match self {
            Role::TextEncoder => "text_encoder",
            Role::Transformer => "transformer",
            _ => "vae_decoder",
        }
    }

    /// The role that a graph's inputs tell of: text encoder, transformer or whole decoder.
    pub fn recognise(graph: &Graph) -> Option<Role> {
        let names: HashSet<&str> = given(graph).map(|id| graph[id].name.as_str()).collect();
        let roles = [Role::TextEncoder, Role::Transformer, Role::Decoder];
        roles.into_iter().find(|role| role.contract().inputs.iter().all(|port| port.is_among(&names)))
    }

    fn contract(self) -> Contract {
        match self {
            Role::TextEncoder => text_encoder(),
            Role::Transformer => transformer(),
            Role::Decoder => Contract { inputs: vec![latent_map()], outputs: vec![picture()] },
            Role::DecoderStart => Contract {
                inputs: vec![latent_map()],
                outputs: vec![middle(), rows("q", "kv_rows"), columns("kt"), rows("v", "kv_rows")],
            },
            Role::Attention => Contract {
                inputs: vec![rows("q_chunk", "chunk_rows"), columns("kt"), rows("v", "kv_rows")],
                outputs: vec![rows("attn_chunk", "chunk_rows")],
            },
            Role::DecoderEnd { index, last } => decoder_end(index, last),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::TextEncoder => "text encoder",
            Role::Transformer => "transformer",
            Role::Decoder => "image decoder",
            Role::DecoderStart => "first stage of the image decoder",
            Role::Attention => "attention stage of the image decoder",
            Role::DecoderEnd { .. } => "stage of the image decoder after its attention",
        })
    }
}

fn named(name: &str) -> Size {
    Size::Named(name.to_owned())
}

fn port(name: &str, aliases: &'static [&'static str], element: Element, sizes: Vec<Size>) -> Port {
    Port { name: name.to_owned(), aliases, element, sizes }
}

fn text_encoder() -> Contract {
    let ids = |name: &str| port(name, &[], Element::Index, vec![Size::One, named("text_seq")]);
    let embeds =
        port("prompt_embeds", &["ctx"], Element::Float, vec![Size::One, named("text_seq"), Size::Own]);
    Contract { inputs: vec![ids("input_ids"), ids("attention_mask")], outputs: vec![embeds] }
}

fn transformer() -> Contract {
    use Element::{Float, Number};
    let tokens = |seq: &str, width| vec![Size::One, named(seq), width];
    let inputs = vec![
        port("latents", &["x", "hidden_states"], Float, tokens("image_seq", Size::Own)),
        port("img_ids", &["x_ids"], Number, tokens("image_seq", Size::Fixed(4))),
        port(SIGMA, &["timesteps", "timestep"], Float, vec![Size::One]),
        port("prompt_embeds", &["ctx", "encoder_hidden_states"], Float, tokens("text_seq", Size::Own)),
        port("txt_ids", &["ctx_ids"], Number, tokens("text_seq", Size::Fixed(4))),
    ];
    let velocity = port("pred", &["noise_pred"], Float, tokens("image_seq", Size::Own));
    Contract { inputs, outputs: vec![velocity] }
}

fn map(place: &str, channels: Size) -> Vec<Size> {
    vec![Size::One, channels, named(&format!("{place}_height")), named(&format!("{place}_width"))]
}

fn latent_map() -> Port {
    port("latents", &["z", "packed_latent"], Element::Float, map("latent", Size::Own))
}

fn picture() -> Port {
    port(PICTURE, &["image", "sample"], Element::Float, map("image", Size::Fixed(3)))
}

fn middle() -> Port {
    port(MIDDLE, &[], Element::Float, map("mid", Size::Own))
}

fn rows(name: &str, count: &str) -> Port {
    port(name, &[], Element::Float, vec![named(count), Size::Own])
}

fn columns(name: &str) -> Port {
    port(name, &[], Element::Float, vec![Size::Own, named("kv_rows")])
}

fn decoder_end(index: usize, last: bool) -> Contract {
    let between = |index: usize| {
        let name = Role::DecoderEnd { index, last: false }.stage();
        port(&name, &[], Element::Float, map(&name, Size::Own))
    };
    let inputs = match index {
        0 => vec![middle(), rows(ATTENDED, "kv_rows")],
        _ => vec![between(index - 1)],
    };
    let outputs = vec![if last { picture() } else { between(index) }];
    Contract { inputs, outputs }
}

impl Port {
    /// Its sizes; rows or columns that are `spread` keep the two sides of their map.
    fn sizes(&self, spread: bool) -> Vec<Size> {
        let sides = || MIDDLE_SIDES.map(named);
        match &self.sizes[..] {
            [Size::Named(_), own] if spread => {
                [&[Size::One][..], &sides(), std::slice::from_ref(own)].concat()
            }
            [own, Size::Named(_)] if spread => [&[Size::One, own.clone()][..], &sides()].concat(),
            sizes => sizes.to_vec(),
        }
    }

    fn is_among(&self, names: &HashSet<&str>) -> bool {
        names.contains(self.name.as_str()) || self.aliases.iter().any(|alias| names.contains(alias))
    }

    /// `'latents' (or 'x')`
    fn in_words(&self) -> String {
        let others: Vec<String> = self.aliases.iter().map(|alias| format!("'{alias}'")).collect();
        match others.is_empty() {
            true => format!("'{}'", self.name),
            false => format!("'{}' (or {})", self.name, others.join(", ")),
        }
    }
}

/// Inputs that a run must be given.
fn given(graph: &Graph) -> impl Iterator<Item = ValueId> + '_ {
    graph.inputs.iter().copied().filter(|id| graph[*id].constant.is_none())
}

/// Checks a graph against its role, names its inputs, outputs and open dimensions as this program does, and drops outputs
/// that nobody asks for. A transformer takes sigma in f32. `names` are the graph's own names of some ports, by this
/// program's: those that no table knows.
///
/// What was adapted before is left as it is.
pub fn adapt(model: &mut Model, role: Role, names: &[(String, String)]) -> Result<(), ContractError> {
    let Contract { inputs, outputs } = role.contract();
    let graph = &mut model.graph;
    let candidates: Vec<ValueId> = given(graph).collect();
    let found_inputs = find(graph, role, "input", &inputs, &candidates, names)?;
    if let Some(extra) = candidates.iter().find(|id| !found_inputs.contains(id)) {
        let expected: Vec<String> = inputs.iter().map(Port::in_words).collect();
        let (name, expected) = (graph[*extra].name.clone(), expected.join(", "));
        return Err(ContractError::Unexpected { role, name, expected });
    }
    let candidates = graph.outputs.clone();
    let found_outputs = find(graph, role, "output", &outputs, &candidates, names)?;
    let spread: HashSet<ValueId> =
        found_inputs.iter().chain(&found_outputs).copied().filter(|id| is_spread(graph, *id)).collect();
    forget_symbols(graph);
    let ports = inputs.iter().zip(found_inputs).chain(outputs.iter().zip(found_outputs.iter().copied()));
    for (port, id) in ports {
        retype(graph, role, port, id, spread.contains(&id))?;
        rename(graph, role, id, &port.name)?;
    }
    graph.outputs = found_outputs;
    if role == Role::Transformer {
        take_in_f32(graph, SIGMA);
    }
    Ok(())
}

fn find(
    graph: &Graph,
    role: Role,
    side: &'static str,
    ports: &[Port],
    candidates: &[ValueId],
    names: &[(String, String)],
) -> Result<Vec<ValueId>, ContractError> {
    let of_port = |port: &Port| {
        let own = names.iter().find(|(ours, _)| *ours == port.name).map(|(_, theirs)| theirs.as_str());
        let known = [port.name.as_str()].into_iter().chain(port.aliases.iter().copied());
        let mut wanted = own.into_iter().chain(known.filter(|_| own.is_none()));
        wanted.find_map(|name| candidates.iter().copied().find(|id| graph[*id].name == name)).ok_or_else(
            || {
                let found: Vec<String> =
                    candidates.iter().map(|id| format!("'{}'", graph[*id].name)).collect();
                let found = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
                let name = own.map_or_else(|| port.in_words(), |own| format!("'{own}'"));
                ContractError::Missing { role, side, name, found }
            },
        )
    };
    ports.iter().map(of_port).collect()
}

/// Names of open dimensions mean nothing beyond their graph: what is not an input or output loses them, and shapes are
/// inferred anew from the inputs.
fn forget_symbols(graph: &mut Graph) {
    for value in &mut graph.values {
        let Some(ValueType::Tensor { shape: Some(shape), .. }) = &mut value.ty else { continue };
        for dim in shape.iter_mut().filter(|dim| matches!(dim, Dim::Symbol(_))) {
            *dim = Dim::Unknown;
        }
    }
}

/// Checks type and shape of a port and names its open dimensions.
fn retype(
    graph: &mut Graph,
    role: Role,
    port: &Port,
    id: ValueId,
    spread: bool,
) -> Result<(), ContractError> {
    let name = graph[id].name.clone();
    let mismatch = |found: String, expected: String| ContractError::Mismatch {
        role,
        tensor: format!("'{name}'"),
        found,
        expected,
    };
    let (dtype, shape) = match &graph[id].ty {
        Some(ValueType::Tensor { dtype, shape }) => (*dtype, shape.clone()),
        _ => return Err(mismatch("no tensor with an element type".to_owned(), "one".to_owned())),
    };
    let (fits, expected) = match port.element {
        Element::Float => (matches!(dtype, DType::F32 | DType::F16), "f32 or f16"),
        Element::Index => (dtype == DType::I64, "i64"),
        Element::Number => (matches!(dtype, DType::F32 | DType::F16 | DType::I64), "f32, f16 or i64"),
    };
    if !fits {
        return Err(mismatch(dtype.name(), expected.to_owned()));
    }
    let expected = port.sizes(spread);
    let own = shape.unwrap_or_else(|| vec![Dim::Unknown; expected.len()]);
    let Some(before) = own.len().checked_sub(expected.len()) else {
        return Err(mismatch(format!("of rank {}", own.len()), format!("rank {}", expected.len())));
    };
    let sizes = std::iter::repeat_n(&Size::One, before).chain(&expected);
    let dims = own.iter().zip(sizes).enumerate().map(|(axis, (own, size))| match (own, size) {
        (Dim::Fixed(1), Size::One) | (Dim::Symbol(_) | Dim::Unknown, Size::One) => Ok(Dim::Fixed(1)),
        (Dim::Fixed(found), Size::One) => {
            Err(mismatch(format!("{found} on axis {axis}"), "1 (no batch)".to_owned()))
        }
        (Dim::Fixed(found), Size::Fixed(size)) if found != size => {
            Err(mismatch(format!("{found} on axis {axis}"), size.to_string()))
        }
        (Dim::Fixed(0), _) => Err(mismatch(format!("0 on axis {axis}"), "more".to_owned())),
        (Dim::Fixed(found), _) => Ok(Dim::Fixed(*found)),
        (_, Size::Fixed(size)) => Ok(Dim::Fixed(*size)),
        (_, Size::Named(symbol)) => Ok(Dim::Symbol(symbol.clone())),
        (_, Size::Own) => Ok(Dim::Unknown),
    });
    let shape = Some(dims.collect::<Result<Vec<_>, _>>()?);
    graph[id].ty = Some(ValueType::Tensor { dtype, shape });
    Ok(())
}

/// The names of the sides of the map that the middle attention runs over.
const MIDDLE_SIDES: [&str; 2] = ["mid_height", "mid_width"];

/// Whether a tensor's rows or columns keep the two sides of their map, [1, height, width, C] or [1, C, height, width], as in
/// decoders cut by this program. Where the sides are fixed, the first of them (or C) stands in a batch's place.
fn is_spread(graph: &Graph, id: ValueId) -> bool {
    let is = |dim: &Dim, name: &str| matches!(dim, Dim::Symbol(symbol) if symbol == name);
    match &graph[id].ty {
        Some(ValueType::Tensor { shape: Some(shape), .. }) if shape.len() == 4 => {
            let named = |sides: &[Dim]| is(&sides[0], MIDDLE_SIDES[0]) && is(&sides[1], MIDDLE_SIDES[1]);
            shape.windows(2).any(named) || matches!(shape[1], Dim::Fixed(2..))
        }
        _ => false,
    }
}

/// Gives a value its new name; another value that had it gets a free one.
fn rename(graph: &mut Graph, role: Role, id: ValueId, name: &str) -> Result<(), ContractError> {
    if graph[id].name == name {
        return Ok(());
    }
    let captured = |graph: &Graph, name: &str| {
        graph.nodes().flat_map(|(_, node)| node.subgraphs()).any(|body| body.captures().contains(name))
    };
    let taken = graph.find(name);
    for id in [Some(id), taken].into_iter().flatten() {
        let name = graph[id].name.clone();
        if captured(graph, &name) {
            return Err(ContractError::Captured { role, name });
        }
    }
    if let Some(other) = taken {
        let free = (1..).map(|i| format!("{name}_{i}")).find(|free| graph.find(free).is_none());
        graph.rename(other, &free.unwrap_or_default());
    }
    graph.rename(id, name);
    Ok(())
}

/// A size of an input or output of an adapted graph, if it is fixed; counted from the first axis.
pub fn fixed_size(graph: &Graph, name: &str, axis: usize) -> Option<usize> {
    let Some(ValueType::Tensor { shape: Some(shape), .. }) = &graph[graph.find(name)?].ty else {
        return None;
    };
    match shape.get(axis)? {
        Dim::Fixed(size) => Some(*size),
        Dim::Symbol(_) | Dim::Unknown => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::Builder;

    /// A decoder with a batch, an element type and names of its own.
    fn decoder(names: [&str; 2], dtype: DType, batch: Dim) -> Model {
        let mut b = Builder::new("decoder");
        let open = |name: &str| Dim::Symbol(name.to_owned());
        let dims = [batch.clone(), Dim::Fixed(12), open("height"), open("width")];
        let z = b.input(names[0], dtype, &dims);
        let x = b.op("Relu", &[z], &[]);
        b.record_shape(x, &dims);
        let y = b.op("Relu", &[x], &[]);
        b.output(y, names[1], &[batch, Dim::Fixed(3), open("height"), open("width")]);
        b.finish()
    }

    fn names(graph: &Graph) -> [String; 2] {
        [graph.inputs[0], graph.outputs[0]].map(|id| graph[id].name.clone())
    }

    #[test]
    fn ports_get_our_names_and_symbols_and_keep_them() {
        let mut model = decoder(["z", "image"], DType::F16, Dim::Symbol("batch".to_owned()));
        assert_eq!(Role::recognise(&model.graph), Some(Role::Decoder));
        for _ in 0..2 {
            adapt(&mut model, Role::Decoder, &[]).unwrap();
            model.graph.validate().unwrap();
            assert_eq!(names(&model.graph), ["latents", "image_raw"]);
            let Some(ValueType::Tensor { shape: Some(shape), .. }) = &model.graph[model.graph.inputs[0]].ty
            else {
                panic!("no shape")
            };
            let open = |name: &str| Dim::Symbol(name.to_owned());
            assert_eq!(*shape, [Dim::Fixed(1), Dim::Fixed(12), open("latent_height"), open("latent_width")]);
        }
        // Inside, "height" would be the latents' and the picture's at once.
        let inner = model.graph.find("Relu_1").unwrap();
        let Some(ValueType::Tensor { shape: Some(shape), .. }) = &model.graph[inner].ty else {
            panic!("no shape")
        };
        assert_eq!(shape[2..], [Dim::Unknown, Dim::Unknown]);
    }

    #[test]
    fn a_value_that_has_our_name_already_gives_way() {
        let mut model = decoder(["z", "latents"], DType::F32, Dim::Fixed(1));
        let theirs = [("image_raw".to_owned(), "latents".to_owned())];
        adapt(&mut model, Role::Decoder, &theirs).unwrap();
        model.graph.validate().unwrap();
        assert_eq!(names(&model.graph), ["latents", "image_raw"]);
    }

    #[test]
    fn broken_contracts_are_told() {
        let told = |names, dtype, batch, role| {
            let mut model = decoder(names, dtype, batch);
            adapt(&mut model, role, &[]).unwrap_err().to_string()
        };
        let own = ["z", "image"];
        for (found, expected) in [
            (
                told(["zz", "image"], DType::F32, Dim::Fixed(1), Role::Decoder),
                "image decoder: no input 'latents' (or 'z', 'packed_latent'); the graph has 'zz'",
            ),
            (
                told(own, DType::F64, Dim::Fixed(1), Role::Decoder),
                "image decoder: 'z' is f64, but f32 or f16 is expected",
            ),
            (
                told(own, DType::F32, Dim::Fixed(2), Role::Decoder),
                "image decoder: 'z' is 2 on axis 0, but 1 (no batch) is expected",
            ),
            (
                told(own, DType::F32, Dim::Fixed(1), Role::TextEncoder),
                "text encoder: no input 'input_ids'; the graph has 'z'",
            ),
        ] {
            assert_eq!(found, expected);
        }
    }
}
