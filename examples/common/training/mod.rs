//! What takes an optimiser step: trained tensors, their gradients, the loss and AdamW.

mod gradients;
pub mod loss;
mod optimizer;
mod parameters;

pub use gradients::Gradients;
pub use optimizer::AdamW;
pub use parameters::Parameters;
