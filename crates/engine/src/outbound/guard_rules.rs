//! The rules for endpoints that came through the API: which addresses and ports may be connected to, and
//! through which proxy. The rules are pure: nothing here resolves a name or opens a connection.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use http::Uri;
use ipnet::IpNet;

use super::public_address::is_public;

/// The addresses that endpoints may have. By default: any public address, on port 443 or 80,
/// without a proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuardRules {
    allow: Vec<IpNet>,
    ports: Vec<u16>,
    proxy: Option<EgressProxy>,
}

/// The ports of endpoints unless the operator names others: those of https and http.
pub const ENDPOINT_PORTS: [u16; 2] = [443, 80];

/// The HTTP proxy that every delivery goes through. Hapax asks the proxy by CONNECT for an address that the
/// rules have accepted, so the proxy resolves no name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressProxy {
    uri: Uri,
}

/// Why a text is not an egress proxy. The message never quotes the text, which may contain a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EgressProxyProblem {
    /// No URL at all.
    #[error("is not a URL")]
    NotUrl,
    /// Another scheme than http.
    #[error("must begin with http://: deliveries are encrypted inside the proxy")]
    Scheme,
    /// A user or a password.
    #[error("must not contain a user name or a password")]
    User,
    /// No host.
    #[error("names no host")]
    Host,
    /// No port, or port 0.
    #[error("names no port")]
    Port,
    /// A path or a query.
    #[error("must have neither path nor query")]
    Path,
}

/// Why an address may not be connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Blocked {
    /// The address is neither public nor in an allowed net.
    #[error("the address is not public, and no net in [outbound] allow contains it")]
    Address,
    /// The address is public, but endpoints may not use this port.
    #[error("port {0} is not one of [outbound] ports")]
    Port(u16),
}

impl Default for GuardRules {
    fn default() -> Self {
        Self::new(Vec::new(), ENDPOINT_PORTS.to_vec(), None)
    }
}

impl GuardRules {
    /// Rules that accept each address in `allow` on any port, and each public address on `ports`.
    pub fn new(allow: Vec<IpNet>, ports: Vec<u16>, proxy: Option<EgressProxy>) -> Self {
        Self { allow, ports, proxy }
    }

    /// The rules for endpoints that a receiving party made itself: with the same proxy, but without
    /// `allow` and `ports`. Such endpoints need a client of their own, because connections are
    /// reused within a client.
    pub fn strictest(&self) -> Self {
        Self { proxy: self.proxy.clone(), ..Self::default() }
    }

    /// The address to connect to, or the reason why it is blocked. An IPv4 address written as IPv6
    /// (`::ffff:…`) is judged and returned as IPv4.
    pub fn judge(&self, address: IpAddr, port: u16) -> Result<SocketAddr, Blocked> {
        let address = address.to_canonical();
        let judged = SocketAddr::new(address, port);
        match (self.allows(address), is_public(address), self.ports.contains(&port)) {
            (true, _, _) | (false, true, true) => Ok(judged),
            (false, true, false) => Err(Blocked::Port(port)),
            (false, false, _) => Err(Blocked::Address),
        }
    }

    /// Whether a net in `allow` contains the address.
    pub(super) fn allows(&self, address: IpAddr) -> bool {
        self.allow.iter().any(|net| net.contains(&address))
    }

    /// Whether some address can be connected to on this port: the port is public, or nets are allowed.
    pub(super) fn may_use_port(&self, port: u16) -> bool {
        !self.allow.is_empty() || self.ports.contains(&port)
    }

    /// Whether the port of a name can be judged only by its addresses: it is not public, but nets are allowed.
    pub(super) fn needs_addresses(&self, port: u16) -> bool {
        !self.allow.is_empty() && !self.ports.contains(&port)
    }

    /// The addresses of `localhost`: the loopback addresses that are allowed. DNS is never asked for this
    /// name.
    pub(super) fn loopback(&self) -> Vec<IpAddr> {
        let both = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
        both.into_iter().filter(|address| self.allows(*address)).collect()
    }

    pub(super) fn proxy(&self) -> Option<&EgressProxy> {
        self.proxy.as_ref()
    }
}

impl fmt::Display for EgressProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.authority())
    }
}

impl EgressProxy {
    /// Reads `http://host:port`.
    pub fn parse(text: &str) -> Result<Self, EgressProxyProblem> {
        let uri: Uri = text.trim().parse().map_err(|_| EgressProxyProblem::NotUrl)?;
        let (Some("http"), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(EgressProxyProblem::Scheme);
        };
        if authority.as_str().contains('@') {
            return Err(EgressProxyProblem::User);
        }
        match (authority.host(), authority.port_u16()) {
            ("", _) => Err(EgressProxyProblem::Host),
            (_, None | Some(0)) => Err(EgressProxyProblem::Port),
            (_, Some(_)) if uri.path() != "/" || uri.query().is_some() => {
                Err(EgressProxyProblem::Path)
            }
            (_, Some(_)) => Ok(Self { uri }),
        }
    }

    /// Its `host:port`.
    pub fn authority(&self) -> &str {
        self.uri.authority().map_or("", |authority| authority.as_str())
    }

    pub(super) fn uri(&self) -> &Uri {
        &self.uri
    }
}
