//! `[outbound]`: the addresses that endpoints may have, and how much is sent to them at once.

use std::net::{Ipv4Addr, Ipv6Addr};

use hapax_engine::{EgressProxy, EgressProxyProblem};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::document::{Entry, Section};
use super::problem::{ConfigProblems, InvalidSetting};
use super::reader::ConfigReader;
use super::settings::Settings;
use super::units;

/// `[outbound]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutboundSettings {
    /// The nets that endpoints may be in although they are not public.
    pub(crate) allow: Vec<IpNet>,
    /// The ports of endpoints. In an allowed net every port may be used.
    pub(crate) ports: Vec<u16>,
    /// The proxy for every delivery.
    pub(crate) proxy: Option<EgressProxy>,
    /// Deliveries in flight, over all endpoints of this node.
    pub(crate) max_in_flight: usize,
    /// The sum of their bodies.
    pub(crate) max_in_flight_bytes: usize,
}

/// Every key of `[outbound]`.
pub(super) const KEYS: [&str; 5] =
    ["allow", "ports", "proxy", "max_in_flight", "max_in_flight_bytes"];

/// The most deliveries in flight: each has a socket, and a process has 65,536 of them at best.
const IN_FLIGHT_MAX: usize = 16_384;

/// The least bytes in flight: one message, which has up to 1 MiB of data, must fit.
const IN_FLIGHT_BYTES_MIN: usize = 2 << 20;

impl Default for OutboundSettings {
    fn default() -> Self {
        Self {
            allow: Vec::new(),
            ports: vec![443, 80],
            proxy: None,
            max_in_flight: 2_048,
            max_in_flight_bytes: 64 << 20,
        }
    }
}

impl OutboundSettings {
    /// Reads `[outbound]` over the defaults.
    pub(super) fn read(section: &Section<'_>, problems: &mut ConfigProblems) -> Self {
        section.expect(&KEYS, problems);
        let mut outbound = Self::default();
        let mut no_ports = None;
        for entry in section.entries() {
            match entry.name() {
                "allow" => {
                    let nets = entry.list(problems).unwrap_or_default();
                    let net = |it: &Entry<'_>| it.parse(units::net, problems);
                    outbound.allow = nets.iter().filter_map(net).collect();
                }
                "ports" => {
                    let ports = entry.list(problems).unwrap_or_default();
                    let port = |it: &Entry<'_>| it.parse_number(port, problems);
                    outbound.ports = ports.iter().filter_map(port).collect();
                    no_ports = ports.is_empty().then_some(entry);
                }
                "proxy" => outbound.proxy = entry.parse(proxy, problems),
                "max_in_flight" => {
                    let count = entry.parse_number(in_flight, problems);
                    outbound.max_in_flight = count.unwrap_or(outbound.max_in_flight);
                }
                "max_in_flight_bytes" => {
                    let bytes = entry.parse_number(in_flight_bytes, problems);
                    outbound.max_in_flight_bytes = bytes.unwrap_or(outbound.max_in_flight_bytes);
                }
                // The problem is reported already.
                _unknown => {}
            }
        }
        if let Some(entry) = no_ports.filter(|_| outbound.allow.is_empty()) {
            let invalid = InvalidSetting::new(
                "is empty, and `allow` names no net: no endpoint could be reached",
                "write ports = [443, 80], or allow = [\"10.0.0.0/8\"]",
            );
            entry.report(invalid, problems);
        }
        outbound
    }

    /// Allows loopback, for dev mode: there the endpoints are on the developer's machine.
    pub(super) fn allow_loopback(&mut self) {
        let v4 = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);
        let v6 = Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128);
        self.allow = vec![v4.into(), v6.into()];
    }

    /// Whether both settings reach the same addresses in the same way.
    pub(crate) fn has_same_way_out(&self, other: &Self) -> bool {
        self.allow == other.allow && self.ports == other.ports && self.proxy == other.proxy
    }

    /// Whether an allowed net contains every address.
    pub(crate) fn allows_everything(&self) -> bool {
        self.allow.iter().any(|net| net.prefix_len() == 0)
    }
}

impl ConfigReader<'_> {
    /// Warns of an `allow` that switches the guard off.
    pub(super) fn check_outbound(&mut self, settings: &Settings) {
        if settings.outbound.allows_everything() {
            self.warnings.push(
                "outbound.allow contains every address: an endpoint can reach this machine, your \
                 network and the metadata service of your cloud"
                    .to_owned(),
            );
        }
    }
}

fn port(text: &str) -> Result<u16, InvalidSetting> {
    let bad = || InvalidSetting::new("is not a port", "write numbers from 1 to 65535: [443, 80]");
    text.trim().parse().ok().filter(|port| *port > 0).ok_or_else(bad)
}

fn proxy(text: &str) -> Result<EgressProxy, InvalidSetting> {
    let invalid = |problem: EgressProxyProblem| {
        InvalidSetting::new(problem.to_string(), "write \"http://egress.internal:3128\"")
    };
    EgressProxy::parse(text).map_err(invalid)
}

fn in_flight(text: &str) -> Result<usize, InvalidSetting> {
    let bad = || {
        InvalidSetting::new(
            format!("is not a number from 1 to {IN_FLIGHT_MAX}"),
            "write a number, such as 2048",
        )
    };
    text.trim().parse().ok().filter(|count| (1..=IN_FLIGHT_MAX).contains(count)).ok_or_else(bad)
}

fn in_flight_bytes(text: &str) -> Result<usize, InvalidSetting> {
    match units::size(text)? {
        bytes @ IN_FLIGHT_BYTES_MIN.. => Ok(bytes),
        _less => Err(InvalidSetting::new(
            "is less than 2MiB: the largest message would never be sent",
            "write a size such as \"64MiB\"",
        )),
    }
}
