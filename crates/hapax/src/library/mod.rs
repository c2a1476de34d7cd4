//! The library's rooms: [`mod@handler`] is what a user writes, [`build`] what a user says of it, and
//! [`running`] the two put together over a store.

mod build;
mod handler;
mod running;

pub use build::{BuildError, Builder, HandlerSetup, Source, handler};
pub use handler::{Event, Handler, HandlerFn, handler_fn};
pub use running::{Hapax, Running};
