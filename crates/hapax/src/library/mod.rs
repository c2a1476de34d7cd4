//! The library's rooms: [`mod@handler`] is what a user writes, [`build`] what a user says of it,
//! [`database`] where it is kept, and [`running`] all of it put together.

mod build;
mod database;
mod handler;
mod running;

pub use build::{BuildError, Builder, HandlerSetup, Source, handler};
pub use database::Database;
pub use handler::{Event, Handler, HandlerFn, handler_fn};
pub use running::{Hapax, Running};
