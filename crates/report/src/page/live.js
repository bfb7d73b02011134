// What is newer replaces what is shown, while somebody looks.
{
  const main = document.querySelector('main'), state = document.createElement('div');
  state.id = 'state';
  document.body.append(state);
  let tag = '';
  const refresh = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch('live', {headers: tag ? {'If-None-Match': tag} : {}, cache: 'no-store'});
      if (answer.status == 200) {
        tag = answer.headers.get('ETag') || '';
        const open = [...main.querySelectorAll('details')].map(one => one.open);
        main.innerHTML = await answer.text();
        main.querySelectorAll('details').forEach((one, i) => { one.open = !!open[i]; });
        document.title = main.querySelector('h1')?.textContent || document.title;
      }
      state.textContent = 'live';
    } catch {
      state.textContent = 'not live any more: the server does not answer';
    }
  };
  setInterval(refresh, 2000);
  document.addEventListener('visibilitychange', refresh);
  refresh();
}
