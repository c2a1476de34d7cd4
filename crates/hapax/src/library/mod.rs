//! The library: [`mod@handler`] is the trait that a user implements, [`build`] the builder, [`database`] the
//! stores it runs on, and [`running`] the assembled instance.

mod build;
mod database;
mod handler;
mod running;

pub use build::{BuildError, Builder, HandlerSetup, Source, handler};
pub use database::Database;
pub use handler::{Event, Handler, HandlerFn, handler_fn};
pub use running::{Hapax, Running};
