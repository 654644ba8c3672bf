use super::*;

#[test]
fn the_code_of_an_error_document_is_found() {
    let body = "<Error><Code>NoSuchBucket</Code><Message>x</Message></Error>";
    assert_eq!(code_of(body).as_deref(), Some("NoSuchBucket"));
    assert_eq!(code_of("<Code>"), None);
    assert_eq!(status_of("status code: 403 Forbidden: x"), Some(403));
    assert_eq!(status_of("no number"), None);
}
