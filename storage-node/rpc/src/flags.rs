//! Values of flags that several programs have, checked at their start.

/// The name of a StorageCluster.
///
/// # Errors
/// What a name is, when it is none.
pub fn cluster(text: &str) -> Result<String, String> {
    let fits = (1..=63).contains(&text.len());
    let plain = text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if fits && plain {
        Ok(text.to_owned())
    } else {
        Err("use the name of the StorageCluster: 1 to 63 of a-z, 0-9 and '-'".into())
    }
}

/// A host or an address, and a port.
///
/// # Errors
/// What it looks like, when it does not.
pub fn host_port(text: &str) -> Result<String, String> {
    let parsed = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    match parsed.map(|(_, port)| port.parse::<u16>()) {
        Some(Ok(_)) => Ok(text.to_owned()),
        _ => Err("use HOST:PORT, for example 10.0.0.1:9000".into()),
    }
}
