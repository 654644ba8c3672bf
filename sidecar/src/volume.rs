//! What the node plugin says about a volume, read. No IO.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use keeper::handover::{Credentials, FromSidecar, Init, Volume};

use crate::resume::{Exchange, ResumeError};

/// The exchange that came with a volume. One that cannot be read is no new mount: INIT would never come again.
pub(crate) fn recorded(volume: &Volume) -> Result<Option<Exchange>, ResumeError> {
    let decode = |text: &str| {
        let bytes = STANDARD.decode(text);
        bytes.map_err(|error| {
            ResumeError::Io("read the recorded INIT", std::io::Error::other(error))
        })
    };
    match (&volume.recorded_init, &volume.recorded_reply) {
        (Some(request), Some(reply)) => {
            Ok(Some(Exchange { request: decode(request)?, reply: decode(reply)? }))
        }
        _ => Ok(None),
    }
}

/// The credentials in a volume's source.
pub(crate) fn credentials(volume: &Volume) -> Option<Credentials> {
    let keys = volume.source.pointer("/s3/credentials")?;
    let text = |name: &str| keys[name].as_str().map(str::to_owned);
    Some(Credentials {
        volume: volume.name.clone(),
        access_key_id: text("accessKeyId")?,
        secret_access_key: text("secretAccessKey")?,
        session_token: text("sessionToken"),
    })
}

/// What the node plugin has to keep of a volume's opening exchange.
pub(crate) fn init_message(volume: &Volume, exchange: &Exchange) -> FromSidecar {
    FromSidecar::Init(Init {
        volume: volume.name.clone(),
        request: STANDARD.encode(&exchange.request),
        reply: STANDARD.encode(&exchange.reply),
        confirm: volume.unkept,
    })
}

/// Whether what was opened for one volume is what the other asks for; credentials may differ.
pub(crate) fn same_files(one: &Volume, other: &Volume) -> bool {
    let key = |volume: &Volume| {
        let mut source = volume.source.clone();
        if let Some(s3) = source.get_mut("s3").and_then(|s3| s3.as_object_mut()) {
            s3.remove("credentials");
        }
        (source, volume.read_only, volume.uid, volume.gid)
    };
    key(one) == key(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_cannot_be_read_is_not_taken_for_a_new_mount() {
        let volume = serde_json::json!({"name": "v", "dataset": "d", "namespace": "n", "readOnly": true,
            "format": "Files", "source": {}, "generation": 1, "last": true});
        let mut volume: Volume = serde_json::from_value(volume).unwrap();
        assert!(recorded(&volume).unwrap().is_none());
        (volume.recorded_init, volume.recorded_reply) = (Some("cmVx".into()), Some("cmVw".into()));
        let read = recorded(&volume).unwrap().unwrap();
        assert_eq!((&*read.request, &*read.reply), (&b"req"[..], &b"rep"[..]));
        volume.recorded_reply = Some("?".into());
        let refused = recorded(&volume).unwrap_err();
        assert!(refused.to_string().contains("recorded INIT"), "{refused}");
    }
}
