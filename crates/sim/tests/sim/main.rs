//! The engines that tests start, and the proxy that cuts their connections.

mod engines;
mod postgres;
mod proxy;
