//! PayPal: RSA by a certificate that chains to the configured roots and names paypal.com.
//!
//! Only a CRC-32 of the body is signed, and another body with the same CRC-32 is easily made. So such an
//! event is a hint to fetch the object, and not the object.

use aws_lc_rs::signature::{ParsedPublicKey, RSA_PKCS1_2048_8192_SHA256};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use jiff::Timestamp;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::keys::{self, ExpiringKey};
use super::recipe::TimeForm;
use super::{
    Authentic, SchemeError, SchemeVerifier, SignError, Signed, SignedContent, expired,
    first_missing, needed, only_the_sender, param, time,
};
use crate::arrival::Arrival;
use crate::source::SourceSpec;
use crate::verify::Refusal;

const ID: &str = "paypal-transmission-id";
const TIME: &str = "paypal-transmission-time";
const SIGNATURE: &str = "paypal-transmission-sig";
const ALGORITHM: &str = "paypal-auth-algo";

/// The key of a checked certificate, and the webhook ids that the signed content may contain.
pub(super) struct PayPalVerifier {
    webhook_ids: Vec<ExpiringKey<String>>,
    key: ParsedPublicKey,
    valid_from: i64,
    valid_to: i64,
}

impl PayPalVerifier {
    pub(super) fn compile(spec: &SourceSpec) -> Result<Self, SchemeError> {
        let webhook_ids = match spec.secrets.is_empty() {
            true => {
                vec![ExpiringKey::forever(
                    param(spec, "webhook_id", "the id of the webhook")?.to_owned(),
                )]
            }
            false => keys::prepare(&spec.secrets, |text| Ok(text.to_owned()))?,
        };
        let chain = certificates(spec, "cert_pem", "the certificate that signs, in PEM")?;
        let roots = certificates(spec, "ca_pem", "the roots it chains to, in PEM")?;
        let leaf = chain.first().ok_or_else(|| bad("cert_pem", "holds no certificate"))?;
        let (_, parsed) =
            X509Certificate::from_der(leaf).map_err(|_| bad("cert_pem", "is not a certificate"))?;
        let names_paypal = parsed
            .subject()
            .iter_common_name()
            .filter_map(|name| name.as_str().ok())
            .any(|name| name.ends_with(".paypal.com"));
        if !names_paypal {
            return Err(bad("cert_pem", "is not a certificate of paypal.com"));
        }
        let valid_from = parsed.validity().not_before.timestamp();
        let valid_to = parsed.validity().not_after.timestamp();
        check_chain(leaf, &chain[1..], &roots, valid_from)?;
        let key = &parsed.public_key().subject_public_key.data;
        let key = ParsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &key[..])
            .map_err(|_| bad("cert_pem", "holds no RSA key of 2048 bits or more"))?;
        Ok(Self { webhook_ids, key, valid_from, valid_to })
    }
}

/// Checks the chain once, at the start of the certificate's validity. Every request checks that the
/// certificate has not expired.
fn check_chain(
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    roots: &[CertificateDer<'_>],
    valid_from: i64,
) -> Result<(), SchemeError> {
    let anchors = roots
        .iter()
        .map(anchor_from_trusted_cert)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| bad("ca_pem", "is not a certificate"))?;
    let leaf =
        EndEntityCert::try_from(leaf).map_err(|_| bad("cert_pem", "is not a certificate"))?;
    let began = std::time::Duration::from_secs(u64::try_from(valid_from).unwrap_or_default());
    leaf.verify_for_usage(
        webpki::ALL_VERIFICATION_ALGS,
        &anchors,
        intermediates,
        UnixTime::since_unix_epoch(began),
        KeyUsage::server_auth(),
        None,
        None,
    )
    .map(|_| ())
    .map_err(|_| bad("cert_pem", "does not chain to ca_pem"))
}

fn certificates(
    spec: &SourceSpec,
    name: &'static str,
    meaning: &str,
) -> Result<Vec<CertificateDer<'static>>, SchemeError> {
    let pem = param(spec, name, meaning)?;
    let all = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| bad(name, "is not PEM"))?;
    match all.is_empty() {
        true => Err(bad(name, "holds no certificate")),
        false => Ok(all),
    }
}

fn bad(name: &str, problem: &str) -> SchemeError {
    SchemeError::new(
        "params",
        format!("{name} {problem}"),
        "cert_pem is the file at PAYPAL-CERT-URL, ca_pem the public roots that it chains to",
    )
}

impl SchemeVerifier for PayPalVerifier {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str> {
        first_missing(headers, [SIGNATURE, ID, TIME, ALGORITHM].into_iter())
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        let wrong = |problem: &str| Refusal::Signature(problem.to_owned());
        if needed(arrival, ALGORITHM)? != "SHA256withRSA" {
            return Err(wrong("the algorithm is not SHA256withRSA"));
        }
        if !(self.valid_from..=self.valid_to).contains(&now.as_second()) {
            return Err(wrong("the certificate is not valid now"));
        }
        let id = needed(arrival, ID)?;
        let stamp = needed(arrival, TIME)?;
        let signature = needed(arrival, SIGNATURE)?;
        let signed_at = time::parse(TimeForm::Rfc3339, &stamp)
            .ok_or_else(|| wrong("the timestamp is not well-formed"))?;
        let signature =
            STANDARD.decode(&*signature).map_err(|_| wrong("the signature is not well-formed"))?;
        let crc = crc32(&arrival.body);
        let mut tried = 0;
        for (secret, webhook_id) in keys::active(&self.webhook_ids, now) {
            tried += 1;
            let content = format!("{id}|{stamp}|{webhook_id}|{crc}");
            if self.key.verify_sig(content.as_bytes(), &signature).is_ok() {
                return Ok(Authentic { signed_at: Some(signed_at), secret });
            }
        }
        match tried {
            0 => Err(expired()),
            _ => Err(wrong(
                "it was not made with the certificate's key, or is for another webhook id",
            )),
        }
    }

    fn sign(&self, _request: &Arrival, _id: &str, _now: Timestamp) -> Result<Signed, SignError> {
        Err(only_the_sender("PayPal"))
    }

    /// Many bodies share a checksum, so the transmission identifies what was signed. It carries one event.
    fn signed_content(&self, arrival: &Arrival) -> Result<SignedContent, Refusal> {
        let (id, stamp) = (needed(arrival, ID)?, needed(arrival, TIME)?);
        Ok(SignedContent::whole([id.as_bytes(), b"|", stamp.as_bytes()]))
    }
}

/// CRC-32 as in zip and PNG.
fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut at = 0;
        while at < 256 {
            let mut value = at as u32;
            let mut bit = 0;
            while bit < 8 {
                value = if value & 1 == 1 { 0xedb8_8320 ^ (value >> 1) } else { value >> 1 };
                bit += 1;
            }
            table[at] = value;
            at += 1;
        }
        table
    };
    !bytes
        .iter()
        .fold(!0, |crc, byte| TABLE[((crc ^ u32::from(*byte)) & 255) as usize] ^ (crc >> 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc_32_as_in_zip() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }
}
