//! Building blocks that several architectures share.

pub mod attention;
pub mod decoder_layer;
pub mod image_decoder;
pub mod mlp;
pub mod norm;
pub mod resnet;
pub mod rope;
pub mod stream;
