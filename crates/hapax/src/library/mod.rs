//! The library: [`mod@handler`] is the trait that a user implements, [`build`] the builder, [`database`] the
//! stores it runs on, [`running`] the assembled instance, and [`sending`] its endpoints and messages.

mod build;
mod database;
mod handler;
mod running;
mod sending;

pub use build::{BuildError, Builder, HandlerSetup, Source, handler};
pub use database::Database;
pub use handler::{Event, Handler, HandlerFn, handler_fn};
pub use running::{Hapax, Running};
pub use sending::{AddedEndpoint, Endpoint, Sending, SendingError, SendingSetupError};
