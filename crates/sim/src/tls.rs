//! Owns throw-away certificates for servers on loopback, each from an authority of its own.

use std::io;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

/// PEM texts: whom to trust, and what the server shows.
pub(crate) struct Issued {
    pub(crate) authority: String,
    pub(crate) certificate: String,
    pub(crate) key: String,
}

/// A certificate for `localhost` and `127.0.0.1`. Not self-signed: clients refuse an authority that
/// poses as a server.
pub(crate) fn issue() -> io::Result<Issued> {
    make().map_err(io::Error::other)
}

fn make() -> Result<Issued, rcgen::Error> {
    let mut authority = CertificateParams::new(Vec::new())?;
    // A name of its own: one that equals the server's makes that one look self-signed.
    authority.distinguished_name.push(DnType::CommonName, "Hapax test authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let server = CertificateParams::new(["localhost".to_owned(), "127.0.0.1".to_owned()])?;
    let key = KeyPair::generate()?;
    let certificate = server.signed_by(&key, &authority)?;
    Ok(Issued {
        authority: authority.pem(),
        certificate: certificate.pem(),
        key: key.serialize_pem(),
    })
}
