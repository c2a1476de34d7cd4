//! The tests of the binary and of the library, in one test binary: it links once, and one PostgreSQL
//! serves all of it.

mod cli;
mod common;
mod examples;
mod library;
mod nodes;
mod pages;
mod portal_visits;
mod proxy;
mod server;
mod support;
mod work;
