//! Tensors that a session takes and gives: on the host or on the device.

use std::borrow::Cow;

use viaduct_export::onnx::DType;

use super::{DeviceTensor, RuntimeError};
use crate::tensor::HostTensor;

/// A tensor wherever it lies. A clone shares its elements.
#[derive(Clone, Debug)]
pub enum Tensor {
    Host(HostTensor),
    Device(DeviceTensor),
}

impl Tensor {
    pub fn view(&self) -> TensorView<'_> {
        match self {
            Tensor::Host(tensor) => TensorView::Host(tensor),
            Tensor::Device(tensor) => TensorView::Device(tensor),
        }
    }

    pub fn shape(&self) -> &[usize] {
        self.view().shape()
    }

    pub fn dtype(&self) -> DType {
        self.view().dtype()
    }

    /// The tensor on the host, read back if it is not there. See [`DeviceTensor::to_host`].
    pub fn into_host(self) -> Result<HostTensor, RuntimeError> {
        match self {
            Tensor::Host(tensor) => Ok(tensor),
            Tensor::Device(tensor) => tensor.to_host(),
        }
    }
}

/// A borrowed [`Tensor`].
#[derive(Clone, Copy, Debug)]
pub enum TensorView<'t> {
    Host(&'t HostTensor),
    Device(&'t DeviceTensor),
}

impl<'t> TensorView<'t> {
    pub fn shape(self) -> &'t [usize] {
        match self {
            TensorView::Host(tensor) => &tensor.shape,
            TensorView::Device(tensor) => tensor.shape(),
        }
    }

    pub fn dtype(self) -> DType {
        match self {
            TensorView::Host(tensor) => tensor.values.dtype(),
            TensorView::Device(tensor) => tensor.dtype(),
        }
    }

    /// The tensor on the host, read back if it is not there.
    pub fn on_host(self) -> Result<Cow<'t, HostTensor>, RuntimeError> {
        match self {
            TensorView::Host(tensor) => Ok(Cow::Borrowed(tensor)),
            TensorView::Device(tensor) => tensor.to_host().map(Cow::Owned),
        }
    }

    /// A tensor that shares the elements.
    pub fn shared(self) -> Tensor {
        match self {
            TensorView::Host(tensor) => Tensor::Host(tensor.clone()),
            TensorView::Device(tensor) => Tensor::Device(tensor.clone()),
        }
    }
}

impl<'t> From<&'t HostTensor> for TensorView<'t> {
    fn from(tensor: &'t HostTensor) -> TensorView<'t> {
        TensorView::Host(tensor)
    }
}

impl<'t> From<&'t DeviceTensor> for TensorView<'t> {
    fn from(tensor: &'t DeviceTensor) -> TensorView<'t> {
        TensorView::Device(tensor)
    }
}

impl<'t> From<&'t Tensor> for TensorView<'t> {
    fn from(tensor: &'t Tensor) -> TensorView<'t> {
        tensor.view()
    }
}

/// Where a session may leave an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// On the host: it is read back.
    Host,
    /// On the device, if the session can leave it there; else on the host. A run then need not wait for the device.
    Anywhere,
}
