//! The commands of the binary, run as a user runs them.

mod config_errors;
mod config_handlers;
mod demo;
mod operate;
mod send;
mod setup;
mod storm;
mod verify;
