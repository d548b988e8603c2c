//! Weight quantisation.
