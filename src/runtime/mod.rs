//! ONNX Runtime: the only module that names the `ort` crate.
//!
//! [`Runtime::start`] loads the libraries and chooses a provider, [`Runtime::open`] makes one session, a [`Stage`].
//! A stage borrows its runtime, so that a second one cannot live beside it; [`KeptSessions`] is the one exception, and so
//! only its sessions leave tensors on the device ([`Tensor`]).

mod assignment;
mod bundle;
mod device;
mod device_tensor;
mod driver_fault;
mod env;
mod error;
mod executor;
mod exit;
mod lower;
pub mod memory;
mod memory_meter;
mod peak;
mod quiet;
mod read_back;
mod resolve;
mod scaled;
mod settings;
mod stage;
mod tensor;
mod tuned;
mod value;
mod vulkan;
mod warm;
mod watchdog;
mod worker;

pub use bundle::{Binding, OpenedAhead};
pub use device::{Device, DeviceKind, Provider, Runtime, RuntimeOptions, expected_profile};
pub use device_tensor::DeviceTensor;
pub use error::RuntimeError;
pub use executor::{Attended, Between, Executor, Session};
pub use exit::{exit, make_file_limits_errors};
pub use lower::{Attention, LowerError, Lowered, lower};
pub use memory_meter::{MemoryMeter, MemoryPeaks};
pub use read_back::Fence;
pub use scaled::gain_of;
pub use settings::Settings;
pub use stage::{Optimisation, Stage, StageModel, TensorInfo};
pub use tensor::{Placement, Tensor, TensorView};
pub use tuned::{KeepError, MeasuredOn, check_tuning_folder, keep_tuning};
pub use vulkan::{Adapter, adapters};
pub use warm::KeptSessions;
pub use watchdog::{Guard, StagePeak, Stopped, Watchdog, volunteer_for_oom_killer};
pub use worker::{Workers, serve};
