//! The dashboard in a real browser, against the real server.

mod browser;
mod dashboard;
