"""`hpcray dashboard`: a running job in a browser.

The process is one of its own, which a user starts beside the job and which joins it as every command does. It asks the
job only what a page that is looked at shows, once for all browsers, and never more than a tenth of the time.

`access` says who may ask; `server` listens; `app` has a route per question; `answer_cache` asks each question once;
`job_pages` gathers the answers. `static/` is the page.
"""
