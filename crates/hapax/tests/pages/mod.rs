//! The dashboard and the portal in a real browser, against the real server.

mod browser;
mod dashboard;
mod portal;
