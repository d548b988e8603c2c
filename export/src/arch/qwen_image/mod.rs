//! Qwen-Image-2.1: a Qwen3-VL text stack, a transformer whose text never reads the picture, and a convolutional autoencoder
//! with an alpha channel.

pub mod parameters;
